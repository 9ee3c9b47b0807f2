"""Quality of a budget: the model with it against the same model without it, on the same text, in steps as a user would run them."""
