"""What functions give of packed values, a kind of functions a file; `pad_safe` lists them."""
