"""Settings that decide what Dynamo traces and when, and the reading of its graphs."""
