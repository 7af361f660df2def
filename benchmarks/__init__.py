"""What `scripts/bench` runs: expstore beside its peers, in one run on the same data."""
