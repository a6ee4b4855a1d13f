"""How learned drafts are trained: texts spoken by the target itself, losses over them, and the loop around both."""
