"""Small twins of models, on which a way to split a model over ranks is proven before it is used."""
