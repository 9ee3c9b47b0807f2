// Kernel table for avx512.
