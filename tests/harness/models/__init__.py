"""Models of protocols, and what explores them."""
