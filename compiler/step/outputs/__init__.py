"""The outputs of a packed step, made when they are used: of tokens alone if no pad has a part in the use."""
