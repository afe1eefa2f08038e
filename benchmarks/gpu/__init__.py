"""What one GPU shows in a few times nine minutes: `python -m gpu --help`."""
