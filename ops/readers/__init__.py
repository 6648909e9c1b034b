"""What the probe reads: this host, its GPUs, the broker's workers, the stack's metrics."""
