// Kernel table of the scalar kernels.
