"""Looking at things: pictures of layouts and of whole trees."""
