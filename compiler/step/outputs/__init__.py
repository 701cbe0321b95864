"""What becomes of a packed step's outputs: made when they are used, of tokens alone where no pad has a part in it."""
