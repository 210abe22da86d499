"""What comes in: OTLP receiver, feedback endpoint, gateway, importers, limits and redaction."""
