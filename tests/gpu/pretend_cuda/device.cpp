// A pretend CUDA device for a torch without CUDA: memory of the host that says "cuda:N", whose kernels are the CPU's.
//
// A build without CUDA leaves the CUDA dispatch key, its device guard and its allocator free. Owns those three: every
// operator falls back to its CPU kernel on the same bytes; the allocator keeps a book by device, fills what it hands
// out and what comes back with 0xFF (NaN in each floating type), and refuses when it is told to. Knows no
// stream: what is ordered after what is device.py's.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kDevices = 8;
thread_local c10::DeviceIndex current = 0;

struct Book {
  std::mutex lock;
  int64_t allocated[kDevices] = {}, reserved[kDevices] = {};
  int64_t count = 0;
  bool refuse_next = false;
  std::unordered_map<void*, std::pair<int64_t, int>> live;
  std::vector<void*> freed;
} book;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current); }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) current = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Allocator final : c10::Allocator {
  static void release(void* p) {
    if (!p) return;
    std::lock_guard<std::mutex> held(book.lock);
    auto found = book.live.find(p);
    std::memset(p, 0xFF, found->second.first);
    book.allocated[found->second.second] -= found->second.first;
    book.live.erase(found);
    book.freed.push_back(p);
    std::free(p);
  }
  c10::DataPtr allocate(size_t size) override {
    const auto device = current;
    if (!size) return {nullptr, nullptr, &release, c10::Device(c10::kCUDA, device)};
    const auto bytes = int64_t((size + 511) / 512 * 512);
    std::lock_guard<std::mutex> held(book.lock);
    ++book.count;
    const bool refused = book.refuse_next;
    book.refuse_next = false;
    TORCH_CHECK_WITH(OutOfMemoryError, !refused, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
                     int(device), " has too little free.");
    void* p = nullptr;
    if (posix_memalign(&p, 512, bytes)) throw std::bad_alloc();
    std::memset(p, 0xFF, bytes);
    book.live[p] = {bytes, device};
    book.allocated[device] += bytes;
    book.reserved[device] = std::max(book.reserved[device], book.allocated[device]);
    return {p, p, &release, c10::Device(c10::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Allocator allocator;
struct Init {
  Init() { c10::SetAllocator(c10::kCUDA, &allocator, 10); }
} init;

struct OnDevice {
  c10::DeviceIndex before = current;
  explicit OnDevice(std::optional<c10::Device> d) {
    if (d && d->has_index()) current = d->index();
  }
  ~OnDevice() { current = before; }
};

at::Tensor as_cpu(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  auto keep = t.storage();
  auto out = at::for_blob(t.data_ptr(), t.sizes())
                 .strides(t.strides())
                 .deleter([keep](void*) {})
                 .options(t.options().device(at::kCPU))
                 .make_tensor();
  return out;
}

// Memory of the book's own, so that every output is counted and can be refused.
at::Tensor as_cuda(const at::Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  at::Tensor out = at::detail::empty_strided_generic(t.sizes(), t.strides(), &allocator,
                                               c10::DispatchKeySet(c10::DispatchKey::CUDA), t.scalar_type());
  if (t.numel()) as_cpu(out).copy_(t);
  return out;
}

bool takes_host_indices(const std::string& name) { return name.rfind("aten::index", 0) == 0 && name != "aten::index_select"; }

// A value with each tensor in it changed.
template <typename Change>
c10::IValue changed(const c10::IValue& v, const Change& change) {
  if (v.isTensor()) return change(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> l;
    for (const at::Tensor& t : v.toTensorVector()) l.push_back(change(t));
    return l;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> l;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      l.push_back(t ? std::optional<at::Tensor>(change(*t)) : t);
    return l;
  }
  return v;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t n = schema.arguments().size(), start = stack->size() - n;
  const std::vector<c10::IValue> given(stack->begin() + start, stack->end());
  std::optional<c10::Device> used, asked;
  const auto see = [&](const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    TORCH_CHECK(!used || *used == t.device(), name, ": Expected all tensors to be on the same device, but found at least ",
                "two devices, ", *used, " and ", t.device(), "!");
    used = t.device();
    return t;
  };
  const auto refuse_host = [&](const at::Tensor& t) {
    TORCH_CHECK(!t.defined() || t.is_cuda() || t.dim() == 0 || takes_host_indices(name), name,
                ": Expected all tensors to be on the same device, but found at least two devices, cuda and cpu!");
    return t;
  };
  for (const auto& v : given) changed(v, see);
  for (size_t i = 0; i < n; ++i) {
    auto& v = (*stack)[start + i];
    if (used) changed(v, refuse_host);
    if (v.isDevice() && v.toDevice().is_cuda()) {
      asked = v.toDevice();
      v = c10::Device(c10::kCPU);
    } else {
      v = changed(v, as_cpu);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  OnDevice on(used ? used : asked);
  const size_t returns = schema.returns().size(), first = stack->size() - returns;
  for (size_t i = 0; i < returns; ++i) {
    auto& v = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (v.isTensor() && alias && alias->isWrite()) {
      for (size_t j = 0; j < n; ++j) {
        const auto* a = schema.arguments()[j].alias_info();
        if (!a || !a->isWrite() || !(*a == *alias)) continue;
        auto mine = given[j].toTensor();
        if (mine.sizes() != v.toTensor().sizes()) {  // an empty output that the operator gave its size
          const at::Tensor resized = as_cuda(v.toTensor());
          mine.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
          mine.unsafeGetTensorImpl()->set_sizes_and_strides(resized.sizes(), resized.strides());
        }
        v = mine;
        break;
      }
    } else {
      v = changed(v, as_cuda);
    }
  }
}

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  as_cpu(self).copy_(as_cpu(source));
  return self;
}
at::Scalar local_scalar_dense(const at::Tensor& self) { return as_cpu(self).item(); }
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
}

// The book, for device.py.
extern "C" {
void pretend_set_device(int device) { current = device; }
int pretend_device() { return current; }
int64_t pretend_allocated(int device) { return book.allocated[device]; }
int64_t pretend_reserved(int device) { return book.reserved[device]; }
int64_t pretend_count() { return book.count; }
void pretend_refuse_next(bool refuse) { book.refuse_next = refuse; }
void pretend_empty_cache() {
  std::lock_guard<std::mutex> held(book.lock);
  for (int i = 0; i < kDevices; ++i) book.reserved[i] = book.allocated[i];
}
int64_t pretend_take_freed(void** out, int64_t room) {
  std::lock_guard<std::mutex> held(book.lock);
  const auto taken = std::min<int64_t>(room, book.freed.size());
  std::memcpy(out, book.freed.data() + book.freed.size() - taken, taken * sizeof(void*));
  book.freed.resize(book.freed.size() - taken);
  return taken;
}
}
