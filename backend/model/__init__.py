"""Values and records that every room needs: their keys, forms and rules. Nothing here talks to anything."""
