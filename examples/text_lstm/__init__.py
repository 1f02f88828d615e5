"""How the sample model of the demo was trained."""
