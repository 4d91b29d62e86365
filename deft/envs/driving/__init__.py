"""A driving simulator in numpy: a curved road with three lanes and traffic, many environments at once."""
