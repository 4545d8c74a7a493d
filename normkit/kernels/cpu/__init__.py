"""C++ kernels for eager arithmetic on a CPU, compiled on first use."""
