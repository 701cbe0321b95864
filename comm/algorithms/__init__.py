"""Ways to carry out a collective, what each costs, and the choice among them."""
