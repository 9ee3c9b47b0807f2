// One request on its way through system calls: which call is the next one, and what the outcome of each means.
#pragma once

#include "reader.h"

namespace colibri {

// Says for either reader what happens after a call: `while (!done()) take(outcome of next())`.
class ReadProgress {
  public:
    ReadProgress() = default;
    ReadProgress(const FileSet& files, const ReadRequest& request) : files_(&files), request_(request) {}

    bool done() const { return result_.outcome != ReadResult::Outcome::ok || result_.arrived >= request_.needed; }
    ReadCall next();
    void take(int64_t outcome);
    // Tells the request's completion.
    void complete() const { request_.completion->read_done(request_.range, result_); }

  private:
    void end(ReadResult::Outcome outcome) { result_.outcome = outcome; }
    bool ended(uint64_t reached) const;

    const FileSet* files_ = nullptr;
    ReadRequest request_;
    ReadResult result_;
    uint64_t calls_ = 0;
    uint64_t at_ = 0;  // where the last call began, in the request
    int stalled_ = 0;
    int refused_ = 0;
};

// The outcome as the caller of a call that was tampered with is to see it.
int64_t owned_up(const ReadCall& call, const Tampering& tampering, int64_t outcome);

// Makes the call on this thread.
int64_t read_now(ReadCall call, ReadHooks& hooks);

}  // namespace colibri
