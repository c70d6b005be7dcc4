"""Operations and layers, repeated on random inputs and compared with references."""
