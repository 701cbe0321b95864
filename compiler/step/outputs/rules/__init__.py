"""The results of functions on packed values, one kind of functions per file; `pad_safe` lists them."""
