"""Operations on a paged KV cache; `reference`, in plain torch, is the oracle of all others."""
