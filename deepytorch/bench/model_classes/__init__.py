"""`deepytorch bench models`: every model class of the installed transformers that builds small, against eager."""
