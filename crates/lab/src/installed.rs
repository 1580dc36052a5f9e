//! Locates the files that `scripts/install` installed for the laboratory beside Debian's packages.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::LabError;
use crate::lab::say;
use crate::process::run;

/// The versions of QEMU between which guests are moved.
pub const QEMU_VERSIONS: [&str; 3] = ["7.2", "10.0", "11.1"];

/// The hint for a missing part.
const HINT: &str = "sudo scripts/install lab";

/// Returns the folder of QEMUs and kernel: /var/lib/longhaul-lab, or `LONGHAUL_LAB_DIR`.
pub fn folder() -> PathBuf {
    std::env::var_os("LONGHAUL_LAB_DIR")
        .map_or_else(|| PathBuf::from("/var/lib/longhaul-lab"), PathBuf::from)
}

/// Returns whether a test must fail, instead of being skipped, when a QEMU is missing; so in CI.
pub fn all_required() -> bool {
    std::env::var_os("LONGHAUL_LAB_REQUIRE_ALL").is_some_and(|value| value != "0")
}

/// Returns whether a test runs today: one of `of` tests that take turns day by day, in UTC. All run
/// with `LONGHAUL_TEST_ALL=1`. A test that does not run says so.
pub fn is_its_day(turn: u64, of: u64) -> bool {
    let set = std::env::var_os("LONGHAUL_TEST_ALL").is_some_and(|value| value != "0");
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let days = now.map_or(0, |now| now.as_secs() / 86_400);
    let is_due = set || days % of.max(1) == turn;
    if !is_due {
        say("SKIPPED today: such tests take turns; all of them: LONGHAUL_TEST_ALL=1");
    }
    is_due
}

/// Returns the folder of the guests' kernel: `vmlinuz`, `modules` and `release`.
///
/// # Errors
/// When it has not been installed.
pub fn kernel() -> Result<PathBuf, LabError> {
    let kernel = folder().join("kernel");
    if kernel.join("vmlinuz").is_file() && kernel.join("modules").is_dir() {
        return Ok(kernel);
    }
    Err(LabError::Missing {
        what: format!("the guests' kernel in {}", kernel.display()),
        hint: HINT.to_owned(),
    })
}

/// Returns the program of QEMU's guest agent.
///
/// # Errors
/// When it has not been installed.
pub fn guest_agent() -> Result<PathBuf, LabError> {
    let agent = folder().join("guest-agent/usr/sbin/qemu-ga");
    match agent.is_file() {
        true => Ok(agent),
        false => Err(LabError::Missing {
            what: format!("QEMU's guest agent ({})", agent.display()),
            hint: HINT.to_owned(),
        }),
    }
}

/// Returns the program of a version of QEMU, or of a path given instead of one.
///
/// # Errors
/// When it has not been installed.
pub fn qemu(version_or_path: &str) -> Result<PathBuf, LabError> {
    let path = if version_or_path.contains('/') {
        PathBuf::from(version_or_path)
    } else {
        folder()
            .join("qemu")
            .join(version_or_path)
            .join("qemu-system-x86_64")
    };
    if path.is_file() {
        return Ok(path);
    }
    Err(LabError::Missing {
        what: format!("QEMU {version_or_path} ({})", path.display()),
        hint: HINT.to_owned(),
    })
}

/// Returns the version that a QEMU reports, such as `10.0.2`.
///
/// # Errors
/// When it does not run.
pub fn qemu_version(program: &Path) -> Result<String, LabError> {
    let said = run(Command::new(program).arg("--version"))?;
    said.split_ascii_whitespace()
        .skip_while(|word| *word != "version")
        .nth(1)
        .map(str::to_owned)
        .ok_or_else(|| LabError::Answer {
            what: program.display().to_string(),
            message: format!("no version in `{}`", said.trim()),
        })
}

#[cfg(test)]
mod tests {
    use super::QEMU_VERSIONS;
    use longhaul_hypervisor::tested;

    #[test]
    fn what_the_product_calls_tested_is_what_is_here() {
        let tested = tested::VERSIONS.map(|(major, minor)| format!("{major}.{minor}"));
        assert_eq!(QEMU_VERSIONS.map(str::to_owned), tested);
    }
}
