//! A run's state on the disk: written whole or not at all, read whole or not at all.
//!
//! ```text
//! run/step-00000123/
//!     config.json model.safetensors     the model, its weights at full precision (in shards, where it is large)
//!     optimiser.safetensors             NAME.first, NAME.second (moments), NAME.updates
//!     state.json                        step, recipe, place in the text, random state; checksums of all files
//! ```

use super::adamw::{AdamW, Moments};
use super::checksum::Checksum;
use super::trainer::TrainerConfig;
use super::windows::{Cursor, Fingerprint};
use crate::atomic::{about, message, remove_folder, write_file, StagedFolder};
use crate::hf;
use crate::init::SeededVars;
use crate::json::{self, Difference};
use crate::model::LlamaConfig;
use crate::tensor_file::write_tensors;
use candle_core::{bail, Device, Error, Result, Tensor};
use rand::rngs::ChaCha12Rng;
use rand::SeedableRng;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

const FORMAT: u64 = 1;
const STATE: &str = "state.json";
const OPTIMISER: &str = "optimiser.safetensors";
const PREFIX: &str = "step-";

/// A run's state at one step, read from its folder and found whole.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
    contents: Contents,
    weights: HashMap<String, Tensor>,
    moments: HashMap<String, Tensor>,
}

/// The newest checkpoint of a run that is whole.
#[derive(Debug, Clone)]
pub struct Latest {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// What is wrong with newer ones, a line for each.
    pub passed_over: Vec<String>,
}

/// `state.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile {
    format: u64,
    /// Of the contents, written as JSON without spaces.
    checksum: String,
    contents: Contents,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    /// Of this crate.
    version: String,
    state: State,
    /// All other files of the checkpoint.
    files: BTreeMap<String, FileSum>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSum {
    bytes: u64,
    checksum: String,
}

/// Where a run stands, but for its weights and moments, and what it is a run of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// Number of steps done.
    pub step: usize,
    /// Time of all steps.
    pub seconds: f64,
    /// Number of threads, on which rounding depends.
    pub threads: usize,
    pub config: TrainerConfig,
    pub model: LlamaConfig,
    /// Dtypes of the working copies.
    pub compute: Vec<String>,
    /// Checksum of the optimiser's groups.
    pub groups: String,
    pub text: Fingerprint,
    pub cursor: Cursor,
    pub draws: Draws,
}

/// The state of a random generator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Draws {
    /// In hexadecimal.
    seed: String,
    stream: u64,
    /// Number of words drawn, in decimal: more than JSON's readers take for a number.
    word: String,
}

impl Draws {
    pub fn of(rng: &ChaCha12Rng) -> Self {
        Self {
            seed: rng.get_seed().iter().map(|b| format!("{b:02x}")).collect(),
            stream: rng.get_stream(),
            word: rng.get_word_pos().to_string(),
        }
    }

    pub fn generator(&self) -> Result<ChaCha12Rng> {
        let mut seed = [0; 32];
        let digits = self.seed.as_bytes();
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|d| d as u8);
        let read = digits.len() == 64
            && (seed.iter_mut().zip(digits.chunks_exact(2))).all(|(byte, pair)| {
                match (digit(pair[0]), digit(pair[1])) {
                    (Some(high), Some(low)) => {
                        *byte = high << 4 | low;
                        true
                    }
                    _ => false,
                }
            });
        match self.word.parse::<u128>() {
            Ok(word) if read && word < 1 << 68 => {
                let mut rng = ChaCha12Rng::from_seed(seed);
                rng.set_stream(self.stream);
                rng.set_word_pos(word);
                Ok(rng)
            }
            _ => bail!("no state of a random generator: {self:?}"),
        }
    }
}

impl State {
    /// # Errors
    /// When a checkpoint is not of the run that goes on: names the first thing that differs.
    pub fn check_same_run(&self, other: &Self) -> Result<()> {
        let parts = |state: &Self| {
            serde_json::to_value(Parts {
                model: &state.model,
                recipe: &state.config,
                compute: &state.compute,
                text: &state.text,
            })
            .map_err(Error::wrap)
        };
        // Other numbers of the recipe may follow from this one.
        let (here, there) = (self.config.steps, other.config.steps);
        if here != there {
            bail!("it is of another run: recipe.steps is {there} there, {here} here")
        }
        if let Some(Difference { place, one, other }) =
            json::difference("", &parts(self)?, &parts(other)?)
        {
            bail!("it is of another run: {place} is {other} there, {one} here")
        }
        if self.groups != other.groups {
            bail!("it is of another run: other weights train, or in other groups")
        }
        Ok(())
    }
}

/// What a run is a run of, by the names that errors use.
#[derive(Serialize)]
struct Parts<'a> {
    model: &'a LlamaConfig,
    recipe: &'a TrainerConfig,
    compute: &'a [String],
    text: &'a Fingerprint,
}

impl Checkpoint {
    /// Reads a checkpoint's folder.
    ///
    /// # Errors
    /// When a file is missing, damaged or of another format.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let contents = read_contents(&folder.join(STATE))?;
        let (mut weights, mut moments) = (HashMap::new(), HashMap::new());
        for (name, sum) in &contents.files {
            let path = folder.join(name);
            if Path::new(name)
                .file_name()
                .is_none_or(|n| n != name.as_str())
            {
                return Err(about(folder, format!("{name:?} is not the name of a file")));
            }
            let bytes = fs::read(&path).map_err(|e| about(&path, e))?;
            if bytes.len() as u64 != sum.bytes || Checksum::of(&bytes).to_string() != sum.checksum {
                return Err(about(
                    &path,
                    "damaged: its checksum is not that in state.json",
                ));
            }
            if name.ends_with(".safetensors") {
                let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)
                    .map_err(|e| about(&path, e))?;
                match name.as_str() {
                    OPTIMISER => moments.extend(tensors),
                    _ => weights.extend(tensors),
                }
            }
        }
        let step = contents.state.step;
        if step_of(folder).is_some_and(|named| named != step) {
            return Err(about(
                folder,
                format!("it holds the state after step {step}"),
            ));
        }
        Ok(Self {
            folder: folder.to_path_buf(),
            contents,
            weights,
            moments,
        })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Number of steps that were done.
    pub fn step(&self) -> usize {
        self.contents.state.step
    }

    /// The recipe of its run.
    pub fn config(&self) -> &TrainerConfig {
        &self.contents.state.config
    }

    /// Why going on from here with this crate may not give the bits of a run without interruption.
    pub(super) fn notes(&self, here: &State) -> Vec<String> {
        let mut notes = Vec::new();
        let (there, version) = (self.state(), env!("CARGO_PKG_VERSION"));
        if there.threads != here.threads {
            notes.push(format!(
                "the run was on {} threads and goes on on {}: sums may round otherwise than without interruption",
                there.threads, here.threads
            ));
        }
        if self.contents.version != version {
            notes.push(format!(
                "the run was with version {} and goes on with {version}: sums may round otherwise",
                self.contents.version
            ));
        }
        notes
    }

    pub(super) fn state(&self) -> &State {
        &self.contents.state
    }

    /// The weights in the order of `like`.
    ///
    /// # Errors
    /// When one is missing, has another shape or dtype, or there are others.
    pub(super) fn weights<'a>(
        &self,
        like: impl Iterator<Item = (&'a str, &'a Tensor)>,
    ) -> Result<Vec<Tensor>> {
        take_all(&self.weights, like)
    }

    /// Name, moments and number of updates of every weight that trains.
    ///
    /// # Errors
    /// When one is missing, has another shape or dtype, or there are others.
    pub(super) fn moments(&self, optimiser: &AdamW) -> Result<Vec<(String, Tensor, Tensor, u64)>> {
        let like = moments_by_name(optimiser)?;
        let like = like.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let mut taken = take_all(&self.moments, like)?.into_iter();
        let mut all = Vec::new();
        for (name, _) in optimiser.state() {
            // Three a weight, in the order of their names.
            if let (Some(first), Some(second), Some(updates)) =
                (taken.next(), taken.next(), taken.next())
            {
                let count = updates.to_scalar::<i64>()?;
                match u64::try_from(count) {
                    Ok(count) => all.push((name.to_string(), first, second, count)),
                    Err(_) => bail!("{name} has had {count} updates"),
                }
            }
        }
        Ok(all)
    }
}

/// Tensors by name, on the devices of those they are like, which name all.
fn take_all<'a>(
    stored: &HashMap<String, Tensor>,
    like: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Result<Vec<Tensor>> {
    let mut taken = Vec::new();
    let mut names = std::collections::BTreeSet::new();
    for (name, like) in like {
        names.insert(name);
        match stored.get(name) {
            Some(tensor) if tensor.dims() == like.dims() && tensor.dtype() == like.dtype() => {
                taken.push(tensor.to_device(like.device())?);
            }
            Some(tensor) => bail!(
                "{name} is {:?} {:?} there, {:?} {:?} here",
                tensor.dtype(),
                tensor.dims(),
                like.dtype(),
                like.dims()
            ),
            None => bail!("it holds no {name}"),
        }
    }
    match stored.keys().find(|name| !names.contains(name.as_str())) {
        Some(name) => bail!("it holds {name}, which is not needed"),
        None => Ok(taken),
    }
}

/// The tensors of the optimiser's file, three a weight.
fn moments_by_name(optimiser: &AdamW) -> Result<Vec<(String, Tensor)>> {
    let mut named = Vec::new();
    for (name, moments) in optimiser.state() {
        let Moments {
            first,
            second,
            updates,
        } = moments;
        let updates = Tensor::new(i64::try_from(*updates).map_err(Error::wrap)?, &Device::Cpu)?;
        named.push((format!("{name}.first"), first.as_detached_tensor()));
        named.push((format!("{name}.second"), second.as_detached_tensor()));
        named.push((format!("{name}.updates"), updates));
    }
    Ok(named)
}

fn read_contents(path: &Path) -> Result<Contents> {
    let bytes = fs::read(path).map_err(|e| about(path, e))?;
    let value = json::parse(&bytes).map_err(|e| about(path, e))?;
    let format = value.get("format").and_then(Value::as_u64);
    if format != Some(FORMAT) {
        let found = format.map_or("none".to_string(), |format| format.to_string());
        return Err(about(
            path,
            format!("its format is {found}, this version reads {FORMAT}"),
        ));
    }
    let file: StateFile = serde_json::from_value(value).map_err(|e| about(path, e))?;
    if checksum(&file.contents)? != file.checksum {
        return Err(about(path, "damaged: its checksum does not fit"));
    }
    Ok(file.contents)
}

fn checksum(contents: &Contents) -> Result<String> {
    let json = serde_json::to_vec(contents).map_err(Error::wrap)?;
    Ok(Checksum::of(&json).to_string())
}

/// The newest checkpoint of a run that is whole, with what is wrong with newer ones; `None` where there is none at all.
///
/// # Errors
/// When the run's folder cannot be read, or there are checkpoints but none is whole.
pub fn latest(run: impl AsRef<Path>) -> Result<Option<Latest>> {
    let run = run.as_ref();
    let mut passed_over = Vec::new();
    for (_, folder) in checkpoints(run)?.into_iter().rev() {
        match Checkpoint::open(&folder) {
            Ok(checkpoint) => {
                return Ok(Some(Latest {
                    checkpoint,
                    passed_over,
                }))
            }
            Err(error) => {
                passed_over.push(format!("passed over a checkpoint: {}", message(&error)))
            }
        }
    }
    match passed_over.first() {
        Some(newest) => Err(about(
            run,
            format!("no checkpoint is whole, of {}; {newest}", passed_over.len()),
        )),
        None => Ok(None),
    }
}

/// Steps and folders of a run's checkpoints, the oldest first.
fn checkpoints(run: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(run).map_err(|e| about(run, e))? {
        let path = entry.map_err(|e| about(run, e))?.path();
        if let Some(step) = step_of(&path).filter(|_| path.is_dir()) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// The step in a checkpoint's name.
fn step_of(folder: &Path) -> Option<usize> {
    let name = folder.file_name()?.to_str()?;
    let digits = name.strip_prefix(PREFIX)?;
    let step = digits.parse().ok()?;
    (name == name_of(step)).then_some(step)
}

fn name_of(step: usize) -> String {
    format!("{PREFIX}{step:08}")
}

/// Writes a checkpoint into a run's folder, then removes all older ones but the newest `kept` with it.
pub(super) fn write(
    run: &Path,
    state: State,
    masters: &SeededVars,
    optimiser: &AdamW,
    kept: usize,
) -> Result<PathBuf> {
    let step = state.step;
    let folder = run.join(name_of(step));
    state
        .model
        .encoding
        .check_named()
        .map_err(|e| about(&folder, e))?;
    let staged = StagedFolder::create(&folder)?;
    write_model(staged.path(), &state.model, masters)?;
    let moments = moments_by_name(optimiser)?;
    let moments = moments.iter().map(|(name, tensor)| (name.as_str(), tensor));
    write_file(&staged.path().join(OPTIMISER), |w| {
        write_tensors(w, moments, None)
    })?;
    let contents = Contents {
        version: env!("CARGO_PKG_VERSION").to_string(),
        state,
        files: sums(staged.path())?,
    };
    if folder.exists() {
        match Checkpoint::open(&folder) {
            Ok(there) if there.contents.is_same_but_for_time(&contents) => return Ok(folder),
            Ok(_) => return Err(about(&folder, "there is one of another run already")),
            Err(_) => remove_folder(&folder)?,
        }
    }
    let file = StateFile {
        format: FORMAT,
        checksum: checksum(&contents)?,
        contents,
    };
    let json = serde_json::to_string_pretty(&file).map_err(Error::wrap)? + "\n";
    write_file(&staged.path().join(STATE), |w| {
        Ok(w.write_all(json.as_bytes())?)
    })?;
    staged.commit()?;

    let mut older = checkpoints(run)?;
    older.retain(|(other, _)| *other <= step);
    for (_, folder) in older.iter().rev().skip(kept) {
        remove_folder(folder)?;
    }
    Ok(folder)
}

/// The model as a folder that [`hf::ModelFolder`] opens. Where the parameters are not exactly a model's, such as one and
/// a probe's, there is no such folder: then the weights alone, from which a run goes on as well.
fn write_model(folder: &Path, config: &LlamaConfig, masters: &SeededVars) -> Result<()> {
    match hf::save_if_a_model(folder, config, masters)? {
        true => Ok(()),
        false => masters.save(folder.join("model.safetensors")),
    }
}

impl Contents {
    fn is_same_but_for_time(&self, other: &Self) -> bool {
        let mut same = self.clone();
        same.state.seconds = other.state.seconds;
        same == *other
    }
}

/// Sizes and checksums of all files in a folder.
fn sums(folder: &Path) -> Result<BTreeMap<String, FileSum>> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(|e| about(folder, e))? {
        let path = entry.map_err(|e| about(folder, e))?.path();
        let bytes = fs::read(&path).map_err(|e| about(&path, e))?;
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            return Err(about(&path, "its name is no text"));
        };
        let sum = FileSum {
            bytes: bytes.len() as u64,
            checksum: Checksum::of(&bytes).to_string(),
        };
        sums.insert(name.to_string(), sum);
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::{EncodingConfig, TapeConfig};
    use crate::model::Llama;
    use crate::train::{Parameters, Schedule, Trainer};
    use candle_core::DType;
    use proptest::prelude::*;
    use proptest::test_runner::{RngSeed, TestRunner};
    use rand::Rng;
    use std::cell::Cell;

    fn trainer() -> Trainer {
        let sizes = LlamaConfig {
            hidden_size: 8,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            encoding: EncodingConfig::Tape(TapeConfig::default()),
            ..LlamaConfig::default()
        };
        let parameters = Parameters::new(SeededVars::new(0));
        let vb = parameters.builder(DType::F32, &Device::Cpu);
        let config = TrainerConfig {
            length: 8,
            steps: 9,
            schedule: Schedule::Constant { peak: 0.01 },
            ..TrainerConfig::default()
        };
        let text: Vec<u32> = (0..200).collect();
        Trainer::new(Llama::new(&sizes, vb).unwrap(), parameters, text, config).unwrap()
    }

    /// Paths to all values within a value.
    fn places(value: &Value, path: &str, found: &mut Vec<String>) {
        found.push(path.to_string());
        match value {
            Value::Object(map) => map
                .iter()
                .for_each(|(k, v)| places(v, &format!("{path}/{}", k.replace('/', "~1")), found)),
            Value::Array(list) => {
                (0..list.len()).for_each(|i| places(&list[i], &format!("{path}/{i}"), found))
            }
            _ => {}
        }
    }

    /// Whoever changes a state and its checksum too can make any state up: then what does not fit the run is refused,
    /// and what does is taken at its word.
    #[test]
    fn state_made_up_under_a_right_checksum_is_refused_or_taken_without_panic() {
        let run = tempfile::tempdir().unwrap();
        let mut saved = trainer();
        saved.step().unwrap();
        let folder = saved.save(run.path()).unwrap();
        let path = folder.join(STATE);
        let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let mut all = Vec::new();
        places(&good, "", &mut all);
        let values = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            (0u64..20).prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[0-9a-f]{64}|\\PC{0,9}|[0-9]{1,40}|\\.\\./[a-z]{1,4}".prop_map(Value::from),
            Just(serde_json::json!({})),
            Just(serde_json::json!([])),
        ];
        let strategy = (prop::sample::select(all), values);
        let mut runner = TestRunner::new(ProptestConfig {
            cases: 600,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(20_261_130),
            ..ProptestConfig::default()
        });
        let (taken, refused) = (Cell::new(0), Cell::new(0));
        let outcome = runner.run(&strategy, |(place, value)| {
            let mut changed = good.clone();
            if let Some(old) = changed.pointer_mut(&place) {
                *old = value;
            }
            let contents = changed.get("contents").cloned().unwrap_or_default();
            if let Ok(contents) = serde_json::from_value::<Contents>(contents) {
                changed["checksum"] = checksum(&contents).unwrap().into();
            }
            fs::write(&path, serde_json::to_vec(&changed).unwrap()).unwrap();
            let mut trainer = trainer();
            match trainer.resume(run.path()) {
                Ok(resumed) => {
                    taken.set(taken.get() + 1);
                    prop_assert_eq!(resumed.map(|r| r.step), Some(1));
                    prop_assert!(trainer.step().is_ok());
                }
                Err(_) => {
                    refused.set(refused.get() + 1);
                    prop_assert_eq!(trainer.steps_done(), 0);
                    prop_assert_eq!(trainer.cursor(), Cursor::default());
                }
            }
            Ok(())
        });
        outcome.unwrap();
        let (taken, refused) = (taken.get(), refused.get());
        assert!(taken > 20 && refused > 200, "{taken} {refused}");
    }

    #[test]
    fn generator_read_back_draws_the_same_numbers() {
        let fresh = || {
            let mut rng = ChaCha12Rng::seed_from_u64(5);
            rng.set_stream(7);
            rng
        };
        let mut rng = fresh();
        let drawn: Vec<u32> = (0..300).map(|_| rng.next_u32()).collect();
        let mut rng = fresh();
        for start in 0..200 {
            let mut back = Draws::of(&rng).generator().unwrap();
            let next: Vec<u32> = (0..100).map(|_| back.next_u32()).collect();
            assert_eq!(next, drawn[start..start + 100], "after {start} words");
            rng.next_u32();
        }
    }

    #[test]
    fn generator_of_damaged_state_is_refused() {
        let good = Draws::of(&ChaCha12Rng::seed_from_u64(5));
        assert!(good.generator().is_ok());
        for bad in [
            Draws {
                seed: "0".repeat(63),
                ..good.clone()
            },
            Draws {
                seed: "ä".repeat(32),
                ..good.clone()
            },
            Draws {
                seed: "g".repeat(64),
                ..good.clone()
            },
            Draws {
                word: "-1".into(),
                ..good.clone()
            },
            Draws {
                word: (1u128 << 68).to_string(),
                ..good.clone()
            },
        ] {
            assert!(bad.generator().is_err(), "{bad:?}");
        }
    }
}
