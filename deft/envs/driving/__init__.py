"""A driving world in numpy: a curved road with three lanes and traffic, many copies stepped at once."""
