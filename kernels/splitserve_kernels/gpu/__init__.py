"""The operations of `splitserve_kernels` in Triton; `availability` says whether they can run."""
