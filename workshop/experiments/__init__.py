"""What two experiments found: a simulation (`map`), and verl's own trainer (`trainer`)."""
