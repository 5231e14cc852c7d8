"""The actor role: step environments, make transitions, explore, ship intake batches; and evaluate."""
