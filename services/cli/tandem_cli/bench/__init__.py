"""Load generation against a running gateway: `tandem bench serve`."""
