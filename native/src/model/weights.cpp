// Reading dense tensors into the form in which they stay in memory.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "../io/repack.h"
#include "colibri/error.h"
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

int64_t row_major_bytes(const StoredMatrix& m) { return m.rows * (m.bits == 8 ? m.cols : (m.cols + 1) / 2); }

int64_t scale_count(const StoredMatrix& m) { return m.rows * (m.group_size ? (m.cols + m.group_size - 1) / m.group_size : 1); }

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
            return m.bits == 32 ? m.rows * m.cols * 4 : row_major_bytes(m) + scale_count(m) * 4;
        case Resident::rows16:
            return shape_of(m).blocks() * shape_of(m).block_bytes();
    }
    return 0;
}

Weights::Weights(const std::string& role, const StoredMatrix& stored, Resident form, const std::vector<std::string>& files)
    : stored_(stored) {
    const bool is_float = stored.bits == 32;
    if ((form == Resident::f32 && !is_float) || (form == Resident::rows16 && is_float) ||
        (form == Resident::row_major && stored.rows16))
        throw Error("UnknownFormatError", "the engine cannot run this tensor in the format that it has", role,
                    form == Resident::f32 ? "float32" : form == Resident::rows16 ? "int4 or int8" : "row-major or float32",
                    is_float ? "float32" : "int" + std::to_string(stored.bits) + (stored.rows16 ? ", 16 rows interleaved" : ""));
    if (is_float) {
        data_ = Buffer<uint8_t>(stored.rows * stored.cols * 4);
        read_extent(files, stored.weights, data_.data());
        return;
    }
    if (form == Resident::rows16 && stored.rows16) {
        data_ = Buffer<uint8_t>(memory_bytes(stored, form));
        read_extent(files, stored.weights, data_.data());
        return;
    }
    Buffer<uint8_t> raw(row_major_bytes(stored));
    Buffer<float> scales(scale_count(stored));
    read_extent(files, stored.weights, raw.data());
    read_extent(files, stored.scales, scales.data());
    if (form == Resident::row_major) {
        data_ = std::move(raw);
        scales_ = std::move(scales);
        return;
    }
    data_ = Buffer<uint8_t>(memory_bytes(stored, form));
    repack_rows16(stored, raw.data(), scales.data(), data_.data());
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
        const int64_t per_row = scale_count(stored_) / stored_.rows;
        kernels.dequantize_int4_row(data_.data() + row * ((cols + 1) / 2), scales_.data() + row * per_row, cols, stored_.group_size,
                                    out);
    }
}

}  // namespace colibri
