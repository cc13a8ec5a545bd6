"""Trust: certificates, roles, and the rights that they give."""
