//! `disk-front`: the processes below a disk while it moves, which agents start. They have threads and
//! no runtime, so that nothing stalls them but what they do.

use crate::cli::args::{DiskFrontArgs, FrontPart};
use clap::ValueEnum;
use longhaul_storage::front::{
    FrontFolder, Policy, Programs, Supervisor, SupervisorError, arriving, pass_through, telling,
};
use longhaul_storage::nbd::Notice;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// This very program, also when its file was replaced since.
const PROGRAM: &str = "/proc/self/exe";

/// Does one part until it is over.
pub(crate) fn run(args: &DiskFrontArgs) -> ExitCode {
    let folder = FrontFolder::open(&args.folder);
    let notice = |notice: Notice| tracing::warn!("{notice}");
    let error = match args.part {
        FrontPart::Supervise => supervise(&args.folder, folder).map_err(|e| e.to_string()),
        FrontPart::Tell => telling(&folder, notice).map_err(|e| e.to_string()),
        FrontPart::Arrive => arriving(&folder, notice).map_err(|e| e.to_string()),
        FrontPart::PassThrough => pass_through(&folder, notice).map_err(|e| e.to_string()),
    };
    match error {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(folder = %args.folder.display(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn supervise(path: &Path, folder: FrontFolder) -> Result<(), SupervisorError> {
    let program = |part: FrontPart| {
        let path = path.to_owned();
        Box::new(move || command(part, &path))
    };
    let programs = match folder.spec()?.arriving {
        // Only it knows what is missing: it is started again and again.
        true => Programs {
            server: program(FrontPart::Arrive),
            fallback: None,
        },
        false => Programs {
            server: program(FrontPart::Tell),
            fallback: Some(program(FrontPart::PassThrough)),
        },
    };
    let report = |event| tracing::info!("{event}");
    Supervisor::start(folder, programs, Policy::default(), report)?.run()
}

fn command(part: FrontPart, folder: &PathBuf) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("disk-front");
    if let Some(part) = part.to_possible_value() {
        command.arg(part.get_name());
    }
    command.arg(folder).stderr(Stdio::inherit());
    command
}
