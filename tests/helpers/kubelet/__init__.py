"""A cluster on this machine, without Kubernetes: an API server, and processes in place of pods."""
