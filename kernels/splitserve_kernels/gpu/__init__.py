"""Operations of `splitserve_kernels` in Triton; `availability` tells whether they can run."""
