// Kernel table for avx2.
