"""Training jobs that lose processes or nodes and go on as if nothing had happened, bit for bit."""
