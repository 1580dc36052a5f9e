//! Hooks: the operator's programs, run before and after the steps of a migration on either side.
//!
//! [`Step`] defines which hooks can stop a migration and when each runs. docs/operating.md,
//! "Hooks", describes this for operators.

use longhaul_api::Side;
use longhaul_hypervisor::process::{Process, ProcessId};
use longhaul_protocol::MigrationId;
use longhaul_protocol::units::{parse_duration, show_duration};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{self, Pid, geteuid};
use serde::{Deserialize, Deserializer, de};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep_until};

/// Default time limit of a hook.
const WITHIN_DEFAULT: Duration = Duration::from_secs(10);
/// Bounds on the configured time limit.
const WITHIN_MIN: Duration = Duration::from_millis(100);
const WITHIN_MAX: Duration = Duration::from_secs(600);
/// Limits on the number of words in a command and on the length of each.
const WORDS_MAX: usize = 64;
const WORD_BYTES_MAX: usize = 4096;
/// Limit on the stored output of a hook, in bytes. The end is stored.
const OUTPUT_BYTES_MAX: usize = 4096;
/// Limit on the part of the output in an error, in characters.
const SAID_CHARS_MAX: usize = 300;
/// The search path of a hook's process.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A step of a migration at which a hook can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// Source: before anything is changed.
    Prepare,
    /// Source: the guest still runs and is about to be stopped.
    Stopping,
    /// Source: the guest is stopped.
    Stopped,
    /// Source: the destination is ready, and the right is about to be released.
    Released,
    /// Source: the guest belongs to the destination.
    Gone,
    /// Source: the guest stays here.
    Stays,
    /// Destination: before a QEMU is started for the guest.
    Arriving,
    /// Destination: everything is loaded, and this is about to be reported.
    Ready,
    /// Destination: the guest belongs here and does not run yet.
    Taken,
    /// Destination: the guest runs here.
    Running,
    /// Destination: the guest does not come.
    NotComing,
}

impl Step {
    /// Returns every step of one side, in order of time.
    pub(crate) fn of(side: Side) -> &'static [Self] {
        match side {
            Side::Source => &[
                Self::Prepare,
                Self::Stopping,
                Self::Stopped,
                Self::Released,
                Self::Gone,
                Self::Stays,
            ],
            Side::Destination => &[
                Self::Arriving,
                Self::Ready,
                Self::Taken,
                Self::Running,
                Self::NotComing,
            ],
        }
    }

    /// Returns the side that the step is on.
    pub(crate) fn side(self) -> Side {
        match Self::of(Side::Source).contains(&self) {
            true => Side::Source,
            false => Side::Destination,
        }
    }

    /// Returns the name of the step in the configuration, for hooks and for operators.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Released => "released",
            Self::Gone | Self::Taken => "committed",
            Self::Stays | Self::NotComing => "aborted",
            Self::Arriving => "arriving",
            Self::Ready => "ready",
            Self::Running => "running",
        }
    }

    /// Returns whether a failed hook stops the migration. After the release it cannot.
    pub(crate) fn can_veto(self) -> bool {
        matches!(
            self,
            Self::Prepare
                | Self::Stopping
                | Self::Stopped
                | Self::Released
                | Self::Arriving
                | Self::Ready
        )
    }

    /// Returns whether the guest is stopped while the hook runs.
    pub(crate) fn holds_guest(self) -> bool {
        matches!(
            self,
            Self::Stopped | Self::Released | Self::Ready | Self::Taken
        )
    }
}

/// The hooks of this host: `[hooks.source]` and `[hooks.destination]` of its configuration.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Hooks {
    source: SourceHooks,
    destination: DestinationHooks,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SourceHooks {
    prepare: Option<Hook>,
    stopping: Option<Hook>,
    stopped: Option<Hook>,
    released: Option<Hook>,
    committed: Option<Hook>,
    aborted: Option<Hook>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DestinationHooks {
    arriving: Option<Hook>,
    ready: Option<Hook>,
    committed: Option<Hook>,
    running: Option<Hook>,
    aborted: Option<Hook>,
}

/// One hook.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hook {
    /// The program and its arguments. They are not passed to a shell.
    command: Vec<String>,
    /// The time limit.
    #[serde(default = "within_default", deserialize_with = "duration")]
    within: Duration,
}

fn within_default() -> Duration {
    WITHIN_DEFAULT
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_duration(&text).map_err(de::Error::custom)
}

/// The migration that a hook runs for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) migration: MigrationId,
    pub(crate) guest: String,
    pub(crate) source: String,
    pub(crate) destination: String,
    /// The generation of the right after the migration.
    pub(crate) generation: u64,
}

/// The result of a hook that ran.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) time: Duration,
    pub(crate) result: Result<Said, HookError>,
}

/// The end of a program's output, as one printable line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Said(String);

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    /// The hook must not be run.
    #[error("{program} {problem}")]
    Unfit {
        /// The program.
        program: String,
        /// The problem, and how to fix it.
        problem: String,
    },
    /// The system could not run the program.
    #[error("{program} cannot be run: {source}")]
    Run {
        /// The program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The hook ended with a failure.
    #[error("{program} ended with {status}{said}")]
    Failed {
        /// The program.
        program: String,
        /// The exit status.
        status: ExitStatus,
        /// The program's output.
        said: Said,
    },
    /// The hook exceeded its time limit.
    #[error("{program} did not end within {} and was killed{said}", show_duration(*within))]
    TooLong {
        /// The program.
        program: String,
        /// The time limit.
        within: Duration,
        /// The program's output.
        said: Said,
    },
}

impl Hooks {
    /// Checks values that the types do not restrict. Does not inspect the programs, which may be
    /// added and removed while the agent runs.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (step, hook) in self.all() {
            let side = match step.side() {
                Side::Source => "source",
                Side::Destination => "destination",
            };
            let problem = |text: &str| Err(format!("`hooks.{side}.{}` {text}", step.name()));
            let Some(program) = hook.command.first() else {
                return problem("has no program: write command = [\"/path/to/program\"]");
            };
            if !program.starts_with('/') {
                return problem("must name its program from `/` on");
            }
            let sound = |word: &String| word.len() <= WORD_BYTES_MAX && !word.contains('\0');
            if hook.command.len() > WORDS_MAX || !hook.command.iter().all(sound) {
                return problem("has a command that is too long (64 words of 4096 bytes)");
            }
            if !(WITHIN_MIN..=WITHIN_MAX).contains(&hook.within) {
                return problem("must have a `within` of 100ms to 10min");
            }
        }
        Ok(())
    }

    /// Returns whether a step has a hook.
    pub(crate) fn has(&self, step: Step) -> bool {
        self.get(step).is_some()
    }

    /// Returns the hooks of a side that cannot be run now, with the reasons.
    pub(crate) fn unfit(&self, side: Side) -> Vec<(Step, HookError)> {
        let of_side = self
            .all()
            .into_iter()
            .filter(|(step, _)| step.side() == side);
        of_side
            .filter_map(|(step, hook)| Some((step, hook.fit().err()?)))
            .collect()
    }

    /// Runs a step's hook to its end. Returns none if the step has no hook.
    pub(crate) async fn run(&self, step: Step, about: &About) -> Option<Ran> {
        let hook = self.get(step)?;
        let began = Instant::now();
        let result = hook.run(step, about).await;
        Some(Ran {
            time: began.elapsed(),
            result,
        })
    }

    fn all(&self) -> Vec<(Step, &Hook)> {
        let steps = Step::of(Side::Source).iter();
        let steps = steps.chain(Step::of(Side::Destination));
        steps
            .filter_map(|step| Some((*step, self.get(*step)?)))
            .collect()
    }

    fn get(&self, step: Step) -> Option<&Hook> {
        let Self {
            source,
            destination,
        } = self;
        match step {
            Step::Prepare => source.prepare.as_ref(),
            Step::Stopping => source.stopping.as_ref(),
            Step::Stopped => source.stopped.as_ref(),
            Step::Released => source.released.as_ref(),
            Step::Gone => source.committed.as_ref(),
            Step::Stays => source.aborted.as_ref(),
            Step::Arriving => destination.arriving.as_ref(),
            Step::Ready => destination.ready.as_ref(),
            Step::Taken => destination.committed.as_ref(),
            Step::Running => destination.running.as_ref(),
            Step::NotComing => destination.aborted.as_ref(),
        }
    }
}

impl Hook {
    fn program(&self) -> String {
        self.command.first().cloned().unwrap_or_default()
    }

    /// Refuses a program that other users could change: it would run as the agent's user.
    fn fit(&self) -> Result<(), HookError> {
        let program = self.program();
        let unfit = |problem: String| {
            Err(HookError::Unfit {
                program: program.clone(),
                problem,
            })
        };
        let found = match fs::metadata(Path::new(&program)) {
            Ok(found) => found,
            Err(error) => return unfit(format!("cannot be looked at: {error}")),
        };
        let mode = found.permissions().mode();
        if !found.is_file() || mode & 0o111 == 0 {
            return unfit("is no program: chmod 755 makes it one".to_owned());
        }
        if mode & 0o022 != 0 {
            return unfit("can be changed by others than its owner: chmod go-w".to_owned());
        }
        if found.uid() != 0 && found.uid() != geteuid().as_raw() {
            return unfit("belongs to neither root nor the agent's user: chown root".to_owned());
        }
        Ok(())
    }

    async fn run(&self, step: Step, about: &About) -> Result<Said, HookError> {
        self.fit()?;
        let failed = |source| HookError::Run {
            program: self.program(),
            source,
        };
        let (mut group, mut output) = self.spawn(step, about).map_err(failed)?;
        let deadline = Instant::now() + self.within;
        let mut text = Output::default();
        let ended = tokio::select! {
            ended = group.ended() => Some(ended),
            () = text.read(&mut output) => None,
            () = sleep_until(deadline) => None,
        };
        // Ends processes that the hook left behind.
        group.kill();
        let status = group.reap().await.map_err(failed)?;
        text.rest(&output);
        let said = text.said();
        match ended {
            Some(Err(error)) => Err(failed(error)),
            None => Err(HookError::TooLong {
                program: self.program(),
                within: self.within,
                said,
            }),
            Some(Ok(())) if !status.success() => Err(HookError::Failed {
                program: self.program(),
                status,
                said,
            }),
            Some(Ok(())) => Ok(said),
        }
    }

    fn spawn(&self, step: Step, about: &About) -> io::Result<(Group, pipe::Receiver)> {
        let (reader, writer) = io::pipe()?;
        let side = match step.side() {
            Side::Source => "source",
            Side::Destination => "destination",
        };
        let child = Command::new(self.program())
            .args(self.command.iter().skip(1))
            .env_clear()
            .env("PATH", PATH)
            .env("LONGHAUL_STEP", step.name())
            .env("LONGHAUL_SIDE", side)
            .env("LONGHAUL_MIGRATION", about.migration.to_string())
            .env("LONGHAUL_GUEST", &about.guest)
            .env("LONGHAUL_SOURCE", &about.source)
            .env("LONGHAUL_DESTINATION", &about.destination)
            .env("LONGHAUL_GENERATION", about.generation.to_string())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0)
            .spawn()?;
        let group = Group::of(child)?;
        Ok((group, pipe::Receiver::from_owned_fd(reader.into())?))
    }
}

/// A hook's process, and the processes that it started and that stayed in its process group.
struct Group {
    child: Child,
    id: Pid,
    /// None if the process ended before it could be opened.
    process: Option<Process>,
    reaped: bool,
}

impl Group {
    fn of(child: Child) -> io::Result<Self> {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let id = id.ok_or_else(|| io::Error::other("it has no number"))?;
        let mut group = Self {
            child,
            id: Pid::from_raw(id),
            process: None,
            reaped: false,
        };
        if let Some(process) = ProcessId::of(id)? {
            group.process = Process::open(&process)?;
        }
        Ok(group)
    }

    /// Waits for the first process to end, without reaping it. Until it is reaped, no other process
    /// group can get its id.
    async fn ended(&self) -> io::Result<()> {
        match &self.process {
            Some(process) => process.ended().await,
            None => Ok(()),
        }
    }

    fn kill(&self) {
        if !self.reaped
            && let Err(error) = killpg(self.id, Signal::SIGKILL)
        {
            tracing::debug!(%error, group = %self.id, "a hook's processes");
        }
    }

    async fn reap(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait().await?;
        self.reaped = true;
        Ok(status)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The end of a program's output.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    cut: bool,
}

impl Output {
    /// Reads output until the future is dropped. Never returns, not even at the end of the output.
    async fn read(&mut self, pipe: &mut pipe::Receiver) {
        let mut piece = [0; 4096];
        loop {
            match pipe.read(&mut piece).await {
                Ok(0) => break,
                Ok(length) => self.add(&piece[..length]),
                Err(error) => {
                    tracing::debug!(%error, "a hook's output");
                    break;
                }
            }
        }
        std::future::pending().await
    }

    /// Reads the output that is available now. Processes that left the group may continue to write.
    /// Reads the pipe directly, because the runtime may not have noticed the last output yet.
    fn rest(&mut self, pipe: &pipe::Receiver) {
        let mut piece = [0; 4096];
        for _ in 0..16 {
            match unistd::read(pipe, &mut piece) {
                Ok(length) if length > 0 => self.add(&piece[..length]),
                _ => break,
            }
        }
    }

    fn add(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        let excess = self.bytes.len().saturating_sub(OUTPUT_BYTES_MAX);
        self.bytes.drain(..excess);
        self.cut |= excess > 0;
    }

    fn said(&self) -> Said {
        let text = String::from_utf8_lossy(&self.bytes);
        let mut line = String::new();
        for word in text.split(|c: char| c.is_whitespace() || c.is_control()) {
            if !word.is_empty() {
                line.push_str(if line.is_empty() { "" } else { " " });
                line.push_str(word);
            }
        }
        if self.cut {
            line.insert_str(0, "[…] ");
        }
        Said(line)
    }
}

impl Said {
    /// Returns all output that is stored.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

impl HookError {
    /// Returns the hook's output.
    pub(crate) fn said(&self) -> &str {
        match self {
            Self::Unfit { .. } | Self::Run { .. } => "",
            Self::Failed { said, .. } | Self::TooLong { said, .. } => said.text(),
        }
    }
}

impl std::fmt::Display for Said {
    /// Formats the output as the end of a sentence.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return f.write_str(" (it wrote nothing)");
        }
        let chars = self.0.chars().count();
        let tail: String = self
            .0
            .chars()
            .skip(chars.saturating_sub(SAID_CHARS_MAX))
            .collect();
        write!(f, ": {tail}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::PathBuf;
    use std::time::Instant;

    fn about() -> About {
        About {
            migration: MigrationId([7; 8]),
            guest: "web-7".into(),
            source: "lyon-1".into(),
            destination: "paris-2".into(),
            generation: 5,
        }
    }

    fn hooks(step: &str, script: &str, within: &str) -> Hooks {
        let text = format!(
            "[source.{step}]\ncommand = [\"/bin/sh\", \"-c\", {script:?}]\nwithin = {within:?}\n"
        );
        let hooks: Hooks = toml::from_str(&text).unwrap();
        hooks.check().unwrap();
        hooks
    }

    async fn run(script: &str, within: &str) -> Result<Said, HookError> {
        let hooks = hooks("released", script, within);
        let ran = hooks.run(Step::Released, &about()).await.unwrap();
        ran.result
    }

    fn has_ended(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        // A zombie has ended too.
        stat.map_or(true, |stat| stat.contains(") Z "))
    }

    async fn wait_for_end(pid: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        while !has_ended(pid) {
            assert!(Instant::now() < until, "process {pid} outlives its hook");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn what_was_written_last_is_heard_though_the_runtime_has_not_been_told() {
        let (reader, mut writer) = io::pipe().unwrap();
        let output = pipe::Receiver::from_owned_fd(reader.into()).unwrap();
        writer.write_all(b"not now").unwrap();
        let mut text = Output::default();
        text.rest(&output);
        assert_eq!(text.said().text(), "not now");
    }

    #[test]
    fn every_step_has_a_side_a_name_and_a_place_in_the_configuration() {
        for side in [Side::Source, Side::Destination] {
            for step in Step::of(side) {
                assert_eq!(step.side(), side);
                let table = match side {
                    Side::Source => "source",
                    Side::Destination => "destination",
                };
                let text = format!(
                    "[{table}]\n{} = {{ command = [\"/bin/true\"] }}",
                    step.name()
                );
                let hooks: Hooks = toml::from_str(&text).unwrap();
                let known: Vec<Step> = hooks.all().into_iter().map(|(step, _)| step).collect();
                assert_eq!(known, [*step]);
                assert!(hooks.has(*step) && hooks.unfit(side).is_empty());
            }
        }
        assert!(Step::Released.can_veto() && Step::Released.holds_guest());
        assert!(!Step::Taken.can_veto() && Step::Taken.holds_guest());
    }

    #[tokio::test]
    async fn a_hook_knows_what_is_documented_and_nothing_else() {
        // The shell itself sets these variables.
        let said = run("unset PWD OLDPWD SHLVL _; env | sort", "10s")
            .await
            .unwrap();
        assert_eq!(
            said.0,
            format!(
                "LONGHAUL_DESTINATION=paris-2 LONGHAUL_GENERATION=5 LONGHAUL_GUEST=web-7 \
                 LONGHAUL_MIGRATION=0707070707070707 LONGHAUL_SIDE=source LONGHAUL_SOURCE=lyon-1 \
                 LONGHAUL_STEP=released PATH={PATH}"
            )
        );
        assert!(
            hooks("released", "true", "1s")
                .run(Step::Stopped, &about())
                .await
                .is_none()
        );
    }

    #[tokio::test]
    async fn a_failure_tells_how_it_ended_and_what_it_wrote() {
        let error = run("echo out; echo the lock is held >&2; exit 3", "10s").await;
        let text = error.unwrap_err().to_string();
        assert_eq!(
            text,
            "/bin/sh ended with exit status: 3: out the lock is held"
        );
        let error = run("kill -9 $$", "10s").await.unwrap_err().to_string();
        assert_eq!(
            error,
            "/bin/sh ended with signal: 9 (SIGKILL) (it wrote nothing)"
        );
    }

    #[tokio::test]
    async fn a_hook_that_takes_too_long_is_killed_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let script = format!("echo waiting; sleep 1000 & echo $! >{file:?}; sleep 1000");
        let error = run(&script, "2s").await.unwrap_err();
        assert!(matches!(error, HookError::TooLong { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.ends_with("within 2 s and was killed: waiting"),
            "{text}"
        );
        wait_for_end(&std::fs::read_to_string(&file).unwrap()).await;
    }

    #[tokio::test]
    async fn what_a_hook_leaves_in_the_background_neither_delays_nor_outlives_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let began = Instant::now();
        let said = run(
            &format!("sleep 1000 & echo $! >{file:?}; echo done"),
            "10min",
        )
        .await;
        assert_eq!(said.unwrap().0, "done");
        assert!(began.elapsed() < Duration::from_secs(300));
        wait_for_end(&std::fs::read_to_string(&file).unwrap()).await;
    }

    #[tokio::test]
    async fn a_hook_that_is_given_up_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let hooks = hooks(
            "stopping",
            &format!("echo $$ >{file:?}; exec sleep 1000"),
            "10min",
        );
        let running = tokio::spawn(async move { hooks.run(Step::Stopping, &about()).await });
        let until = Instant::now() + Duration::from_secs(60);
        let pid = loop {
            let pid = std::fs::read_to_string(&file).unwrap_or_default();
            if pid.ends_with('\n') {
                break pid;
            }
            assert!(Instant::now() < until);
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        running.abort();
        wait_for_end(&pid).await;
    }

    #[tokio::test]
    async fn only_the_end_of_much_output_is_kept_and_printable() {
        let script = "i=0; while [ $i -lt 4000 ]; do echo line-$i; i=$((i+1)); done; printf \
            '\\033[2Jend\\n'";
        let said = run(script, "60s").await.unwrap();
        assert!(
            said.0.starts_with("[…] ") && said.0.ends_with(" [2Jend"),
            "{said}"
        );
        assert!(said.0.len() <= OUTPUT_BYTES_MAX + 8, "{}", said.0.len());
        assert!(said.to_string().chars().count() <= SAID_CHARS_MAX + 2);
    }

    #[tokio::test]
    async fn what_others_could_change_is_not_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("hook");
        let hooks = |file: &PathBuf| -> Hooks {
            toml::from_str(&format!("[source]\nreleased = {{ command = [{file:?}] }}")).unwrap()
        };
        for (mode, expected) in [
            (None, "cannot be looked at"),
            (Some(0o644), "is no program"),
            (Some(0o775), "can be changed by others"),
        ] {
            if let Some(mode) = mode {
                std::fs::write(&file, "#!/bin/sh\n").unwrap();
                fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            }
            let hooks = hooks(&file);
            let ran = hooks.run(Step::Released, &about()).await.unwrap();
            let error = ran.result.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            let unfit = hooks.unfit(Side::Source);
            assert_eq!(unfit.len(), 1);
            assert!(hooks.unfit(Side::Destination).is_empty());
        }
    }
}
