// The books: the owners of memory, and the memory that copies under way will touch.
#include "books.hpp"

namespace fake_cuda {
namespace {

uint64_t num_bookings = 0;

std::map<uint64_t, Range>& flights() {
  static auto* all = new std::map<uint64_t, Range>;
  return *all;
}

Range range_of_entry(const Book::value_type& entry) { return {entry.first, entry.second.bytes}; }

const Book::value_type* first_overlap(const Book& book, const Range& range) {
  auto next = book.upper_bound(range.begin);
  if (next != book.begin() && range_of_entry(*std::prev(next)).overlaps(range)) return &*std::prev(next);
  return next != book.end() && range_of_entry(*next).overlaps(range) ? &*next : nullptr;
}

}  // namespace

std::mutex books_mutex;

Book& device_book() {
  static auto* book = new Book;
  return *book;
}

Book& host_book() {
  static auto* book = new Book;
  return *book;
}

uint64_t next_booking() { return ++num_bookings; }

bool overlaps_with_any(const Book& book, const Range& range) { return first_overlap(book, range); }

bool unbook(Book& book, const void* begin, Block* block) {
  auto found = book.find(reinterpret_cast<uintptr_t>(begin));
  if (found == book.end()) return false;
  *block = found->second;
  book.erase(found);
  return true;
}

bool is_flying(const Range& range) {
  for (const auto& flight : flights())
    if (flight.second.overlaps(range)) return true;
  return false;
}

uint64_t begin_flight(const Range& range) {
  std::lock_guard<std::mutex> lock(books_mutex);
  flights()[++num_bookings] = range;
  return num_bookings;
}

void end_flight(uint64_t flight) {
  std::lock_guard<std::mutex> lock(books_mutex);
  flights().erase(flight);
}

Location locate(const Range& range) {
  std::lock_guard<std::mutex> lock(books_mutex);
  for (const Book* book : {&device_book(), &host_book()}) {
    const Book::value_type* entry = first_overlap(*book, range);
    if (!entry) continue;
    const bool whole = entry->first <= range.begin && range.end() <= range_of_entry(*entry).end();
    if (!whole || (book == &host_book() && !is_mapped(range))) return {Place::unmapped, entry->second.device, 0};
    return {book == &device_book() ? Place::device : Place::registered, entry->second.device, entry->second.booking};
  }
  return {is_mapped(range) ? Place::pageable : Place::unmapped, -1, 0};
}

std::string describe(const Location& location) {
  switch (location.place) {
    case Place::device: return "memory of device " + std::to_string(location.device);
    case Place::registered: return "registered host memory";
    case Place::pageable: return "pageable host memory";
    default: return "memory that is not there, or not wholly allocated or registered";
  }
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  const Location location = locate(range_of(pointer, 1));
  *attributes = {};
  attributes->device = location.device;
  if (location.place == Place::device) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (location.place == Place::registered) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
  }
  return cudaSuccess;
}

EXPORTED int64_t fake_cuda_num_device_blocks() {
  std::lock_guard<std::mutex> lock(books_mutex);
  return static_cast<int64_t>(device_book().size());
}

EXPORTED int64_t fake_cuda_num_registrations() {
  std::lock_guard<std::mutex> lock(books_mutex);
  return static_cast<int64_t>(host_book().size());
}
