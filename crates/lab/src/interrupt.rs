//! Handles Ctrl-C and the signals that request an end: recorded at once, obeyed where everything
//! can be cleaned up.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::error::{During, LabError};

/// The number of such signals received.
static REQUESTS: AtomicU32 = AtomicU32::new(0);
/// The number of signals after which the process ends without cleanup.
const REQUESTS_MAX: u32 = 3;

/// Installs handlers that record signals instead of ending the process; the third one ends it
/// nevertheless. Child processes are not affected: they handle signals as usual.
///
/// # Errors
/// When the system refuses.
pub fn catch() -> Result<(), LabError> {
    let action = SigAction::new(
        SigHandler::Handler(note),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        #[expect(
            unsafe_code,
            reason = "there is no safe way to handle a signal without blocking it, \
            and a blocked one stays blocked in every process that is started"
        )]
        // SAFETY: the handler touches nothing but an atomic number, and calls nothing but `_exit`:
        // both may be done at any moment.
        unsafe { sigaction(signal, &action) }.during(|| format!("handle {signal}"))?;
    }
    Ok(())
}

extern "C" fn note(_signal: libc::c_int) {
    if REQUESTS.fetch_add(1, Ordering::SeqCst) + 1 >= REQUESTS_MAX {
        #[expect(
            unsafe_code,
            reason = "the only way to end that a signal handler may take"
        )]
        // SAFETY: `_exit` may be called from a signal handler, and does not come back.
        unsafe {
            libc::_exit(130)
        }
    }
}

/// Returns whether this process was asked to end.
pub fn requested() -> bool {
    REQUESTS.load(Ordering::SeqCst) > 0
}

/// Fails if this process was asked to end.
///
/// # Errors
/// [`LabError::Interrupted`] when it was.
pub fn check() -> Result<(), LabError> {
    if requested() {
        Err(LabError::Interrupted)
    } else {
        Ok(())
    }
}

/// Sleeps for this long, or until this process is asked to end.
///
/// # Errors
/// [`LabError::Interrupted`] when it is.
pub fn sleep(time: Duration) -> Result<(), LabError> {
    let until = Instant::now() + time;
    loop {
        check()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(Duration::from_millis(50)));
    }
}
