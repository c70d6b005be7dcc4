"""One description of each kind of device: rates, layouts of kernels, what the simulator needs."""
