// Declarations that the files of this folder share: the owners of bytes, and their pages.
#pragma once

#include <map>

#include "runtime.hpp"

namespace fake_cuda {

// ---- books.cpp

struct Block {
  size_t bytes;
  int device;
  uint64_t booking;
  bool owned;  // made by this runtime, not registered
};
using Book = std::map<uintptr_t, Block>;

extern std::mutex books_mutex;  // of all books, and of the counts of bytes in device_memory.cpp
Book& device_book();
Book& host_book();

// Callers of these functions hold `books_mutex`.
uint64_t next_booking();
bool overlaps_with_any(const Book& book, const Range& range);
bool unbook(Book& book, const void* begin, Block* block);  // takes a block out of a book
bool is_flying(const Range& range);                        // a copy on its way will touch it

// ---- pages.cpp

void* map_pages(size_t bytes);  // null if the system has none
bool is_mapped(const Range& range);
int unmap_pages(void* pointer, size_t bytes);
int unmap_when_unused(void* pointer, size_t bytes);

// Poison shows reads of memory that was never written: 0xFF is NaN in every floating format, and -1 as an index.
void poison(void* memory, size_t bytes);

}  // namespace fake_cuda
