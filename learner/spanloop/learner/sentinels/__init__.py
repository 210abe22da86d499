"""Sentinels: changes in what agents do that the outcome does not pay for. They freeze promotion and name the orchestrations."""
