"""What Dynamo traces and when, and the reading of its graphs."""
