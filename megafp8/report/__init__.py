"""Floor 6: one HTML page out of run folders. It reads what runs left and starts nothing; numbers and drawings apart."""

from megafp8.report.page import build as build
from megafp8.report.page import summary as summary
