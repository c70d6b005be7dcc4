"""What kernels say to warps, blocks and clusters where Pallas has no word for it."""
