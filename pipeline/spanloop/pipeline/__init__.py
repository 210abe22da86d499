"""From spans to orchestrations, rewards, credit and samples, as pure reducers; ports, adapters, runtimes and the read side."""
