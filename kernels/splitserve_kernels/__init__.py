"""Operations on a paged KV cache; `reference` is plain torch and the oracle of all others."""
