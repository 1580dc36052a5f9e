//! Ctrl-C and the signals that ask to end: noticed at once, obeyed where things can be put away.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};

use crate::error::{During, LabError};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// From now on signals that ask to end are noted instead of ending the process; the third one ends
/// it all the same. To be called before any other thread is started.
///
/// # Errors
/// When the signals cannot be blocked or the thread not be started.
pub fn catch() -> Result<(), LabError> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals
        .thread_block()
        .during(|| "block the signals that ask to end".to_owned())?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for _ in 0..2 {
                // It fails only for a set of signals that is not one.
                let _ = signals.wait();
                REQUESTED.store(true, Ordering::SeqCst);
            }
            let _ = signals.wait();
            std::process::exit(130);
        })
        .during(|| "start a thread".to_owned())?;
    Ok(())
}

/// Whether somebody asked this process to end.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Goes on only if nobody asked this process to end.
///
/// # Errors
/// [`LabError::Interrupted`] when somebody did.
pub fn check() -> Result<(), LabError> {
    if requested() {
        Err(LabError::Interrupted)
    } else {
        Ok(())
    }
}

/// Sleeps for this long, or until somebody asks this process to end.
///
/// # Errors
/// [`LabError::Interrupted`] when somebody does.
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
