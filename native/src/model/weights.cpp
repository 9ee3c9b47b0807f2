// Reading dense tensors into the form in which they stay in memory.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "colibri/error.h"
#include "colibri/repack.h"
#include "matrix.h"

namespace colibri {

namespace {

// Closes on every way out.
class File {
  public:
    File(const std::string& path, const std::string& role) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd_ < 0) throw Error("ReadError", "cannot open", path + ", " + role, "a readable file", std::strerror(errno));
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }

  private:
    int fd_;
};

void read_extent(const std::vector<std::string>& files, const Extent& extent, void* out) {
    const std::string& path = files.at(extent.file);
    const File file(path, extent.tensor);
    uint64_t done = 0;
    while (done < extent.nbytes) {
        const ssize_t got = ::pread(file.fd(), static_cast<char*>(out) + done, extent.nbytes - done, extent.offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            throw Error("ReadError", "cannot read a tensor",
                        path + ", " + extent.tensor + ", offset " + std::to_string(extent.offset + done),
                        std::to_string(extent.nbytes) + " bytes", got < 0 ? std::strerror(errno) : "end of file");
        done += static_cast<uint64_t>(got);
    }
}

int64_t weight_bytes(const StoredMatrix& m) { return m.bits == 32 ? m.rows * m.cols * 4 : stored_weight_bytes(m); }

MatrixView shape_of(const StoredMatrix& m) {
    const int64_t group = m.bits == 4 && m.group_size ? m.group_size : kActivationGroup;
    return {m.rows, m.cols, m.bits, group, nullptr};
}

}  // namespace

int64_t Weights::memory_bytes(const StoredMatrix& m, Resident form) {
    switch (form) {
        case Resident::f32:
            return m.rows * m.cols * 4;
        case Resident::row_major:
            return weight_bytes(m) + (m.bits == 32 ? 0 : stored_scale_bytes(m));
        case Resident::rows16:
            return rows16_bytes(m);
    }
    return 0;
}

Weights::Weights(const std::string& role, const StoredMatrix& stored, Resident form, const std::vector<std::string>& files)
    : stored_(stored) {
    const bool is_float = stored.bits == 32;
    if ((form == Resident::rows16 && is_float) || (form != Resident::rows16 && stored.rows16))
        throw Error("UnknownFormatError", "the engine cannot run this tensor in the format that it has", role,
                    is_float ? "int4 or int8" : "rows that lie one after another", is_float ? "float32" : "16 rows interleaved");
    Buffer<uint8_t> raw(weight_bytes(stored));
    read_extent(files, stored.weights, raw.data());
    if (is_float || stored.rows16) {
        data_ = std::move(raw);
        return;
    }
    scales_ = Buffer<float>(stored_scale_bytes(stored) / static_cast<int64_t>(sizeof(float)));
    read_extent(files, stored.scales, scales_.data());
    if (form == Resident::row_major) {
        data_ = std::move(raw);
        return;
    }
    data_ = Buffer<uint8_t>(memory_bytes(stored, form));
    if (form == Resident::rows16) {
        repack_rows16(stored, raw.data(), reinterpret_cast<const uint8_t*>(scales_.data()), data_.data());
    } else {
        std::swap(data_, raw);
        for (int64_t r = 0; r < stored.rows; ++r)
            row(kernels_for("scalar"), r, reinterpret_cast<float*>(raw.data()) + r * stored.cols);
        std::swap(data_, raw);
        stored_.bits = 32;
    }
    scales_ = {};
}

MatrixView Weights::view() const {
    MatrixView view = shape_of(stored_);
    view.data = data_.data();
    return view;
}

void Weights::row(const Kernels& kernels, int64_t row, float* out) const {
    const int64_t cols = stored_.cols;
    if (stored_.bits == 32) {
        std::memcpy(out, f32() + row * cols, cols * sizeof(float));
    } else if (stored_.bits == 8) {
        kernels.dequantize_int8_row(reinterpret_cast<const int8_t*>(data_.data()) + row * cols, scales_[row], cols, out);
    } else {
        const int64_t per_row = scales_.size() / stored_.rows;
        kernels.dequantize_int4_row(data_.data() + row * ((cols + 1) / 2), scales_.data() + row * per_row, cols, stored_.group_size,
                                    out);
    }
}

}  // namespace colibri
