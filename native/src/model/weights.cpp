// Reading dense tensors into the form in which they stay in memory.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
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

constexpr int64_t kRepackedAtOnce = 4 << 20;  // bytes of the file's layout that are in memory beside the repacked ones

// `count` bytes of a tensor, from byte `first` of it.
void read_extent(const std::vector<std::string>& files, const Extent& extent, int64_t first, int64_t count, void* out) {
    const std::string& path = files.at(extent.file);
    const File file(path, extent.tensor);
    const uint64_t begin = extent.offset + static_cast<uint64_t>(first), nbytes = static_cast<uint64_t>(count);
    uint64_t done = 0;
    while (done < nbytes) {
        const ssize_t got = ::pread(file.fd(), static_cast<char*>(out) + done, nbytes - done, static_cast<off_t>(begin + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            throw Error("ReadError", "cannot read a tensor",
                        path + ", " + extent.tensor + ", offset " + std::to_string(begin + done),
                        std::to_string(extent.nbytes) + " bytes", got < 0 ? std::strerror(errno) : "end of file");
        done += static_cast<uint64_t>(got);
    }
}

void check_finite(const float* values, int64_t count, const std::vector<std::string>& files, const Extent& extent) {
    for (int64_t i = 0; i < count; ++i)
        if (!std::isfinite(values[i]))
            throw Error("NonFiniteWeightError", "a weight or a scale is not finite", files.at(extent.file) + ", " + extent.tensor,
                        "a number", std::to_string(values[i]));
}

void check_bytes(const Extent& extent, int64_t expected) {
    if (extent.nbytes != static_cast<uint64_t>(expected))
        throw Error("ShapeError", "bytes of a tensor", extent.tensor, std::to_string(expected), std::to_string(extent.nbytes));
}

int64_t weight_bytes(const StoredMatrix& m) { return m.bits == 32 ? m.rows * m.cols * 4 : stored_weight_bytes(m); }

}  // namespace

Resident resident_form(const std::string& role) {
    const auto ends_with = [&](const char* tail) { return role.ends_with(tail); };
    if (role == "embed" || ends_with(".kv_b") || ends_with(".wq_b") || ends_with(".wk")) return Resident::row_major;
    if (ends_with("norm") || ends_with("norm_weight") || ends_with("bias") || ends_with("router.weight") ||
        ends_with("weights_proj"))
        return Resident::f32;
    return Resident::rows16;
}

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
    const int64_t nbytes = weight_bytes(stored);
    check_bytes(stored.weights, nbytes);
    if (is_float || stored.rows16 || form == Resident::row_major) {
        data_ = Buffer<uint8_t>(nbytes);
        read_extent(files, stored.weights, 0, nbytes, data_.data());
        if (is_float) check_finite(f32(), stored.rows * stored.cols, files, stored.weights);
        if (stored.rows16) check_inner_scales(files);
        if (is_float || stored.rows16) return;
    }
    const int64_t scale_bytes = stored_scale_bytes(stored);
    check_bytes(stored.scales, scale_bytes);
    scales_ = Buffer<float>(scale_bytes / static_cast<int64_t>(sizeof(float)));
    read_extent(files, stored.scales, 0, scale_bytes, scales_.data());
    check_finite(scales_.data(), scales_.size(), files, stored.scales);
    if (form == Resident::row_major) return;
    if (form == Resident::rows16)
        read_repacked(files);
    else
        read_dequantised(files);
    scales_ = {};
}

// A few row blocks at a time: the file's layout and the kernels' are never in memory together.
void Weights::read_repacked(const std::vector<std::string>& files) {
    const int64_t row_bytes = weight_bytes(stored_) / stored_.rows, scale_bytes = stored_scale_bytes(stored_) / stored_.rows;
    const int64_t at_once = std::max<int64_t>(1, kRepackedAtOnce / (row_bytes * kRowBlock)) * kRowBlock;
    Buffer<uint8_t> raw(std::min(at_once, stored_.rows) * row_bytes);
    data_ = Buffer<uint8_t>(memory_bytes(stored_, Resident::rows16));
    uint8_t* out = data_.data();
    for (int64_t first = 0; first < stored_.rows; first += at_once) {
        StoredMatrix part = stored_;
        part.rows = std::min(at_once, stored_.rows - first);
        read_extent(files, stored_.weights, first * row_bytes, part.rows * row_bytes, raw.data());
        repack_rows16(part, raw.data(), reinterpret_cast<const uint8_t*>(scales_.data()) + first * scale_bytes, out);
        out += rows16_bytes(part);
    }
}

void Weights::read_dequantised(const std::vector<std::string>& files) {
    data_ = Buffer<uint8_t>(weight_bytes(stored_));
    read_extent(files, stored_.weights, 0, data_.size(), data_.data());
    Buffer<uint8_t> values(memory_bytes(stored_, Resident::f32));
    for (int64_t r = 0; r < stored_.rows; ++r)
        row(kernels_for("scalar"), r, reinterpret_cast<float*>(values.data()) + r * stored_.cols);
    data_ = std::move(values);
    stored_.bits = 32;
}

void Weights::check_inner_scales(const std::vector<std::string>& files) const {
    const MatrixView matrix = view();
    const bool per_group = matrix.bits == 4;
    const int64_t runs = matrix.blocks() * (per_group ? matrix.groups() : 1);
    const int64_t stride = per_group ? int4_record_bytes(matrix.group, matrix.scale_bytes) : matrix.block_bytes();
    const int64_t at = per_group ? matrix.group / 2 * kRowBlock : 0;
    for (int64_t i = 0; i < runs; ++i) {
        float scales[kRowBlock];
        const uint8_t* bytes = matrix.data + i * stride + at;
        if (matrix.scale_bytes == 2) {
            uint16_t halves[kRowBlock];
            std::memcpy(halves, bytes, sizeof halves);
            std::transform(halves, halves + kRowBlock, scales, float_of_half);
        } else {
            std::memcpy(scales, bytes, sizeof scales);
        }
        check_finite(scales, kRowBlock, files, stored_.weights);
    }
}

MatrixView Weights::view() const { return view_of(stored_, data_.data()); }

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
