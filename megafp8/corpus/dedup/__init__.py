"""Steps that look at the whole corpus: exact and near duplicates of documents, repeated paragraphs and lines."""
