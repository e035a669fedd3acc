"""How good a network is: accuracy, and closed-form few-shot."""
