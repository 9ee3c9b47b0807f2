"""Tests of colibri_jax."""
